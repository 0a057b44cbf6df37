"""For the tutorial of pipelines: ten orders, and a payment for each; new ones with every run."""

import json
import sys
import uuid

from magnetar.blocking import Client

url = sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"
# An order that is sent twice would be joined with each of its payments.
run = uuid.uuid4().hex[:6]
with (
    Client(url) as client,
    client.producer("topic://public/default/orders") as orders,
    client.producer("topic://public/default/payments") as payments,
):
    for number in range(10):
        order, customer = f"o{run}-{number}", f"c{number % 3}"
        value = {"id": order, "customer": customer, "amount": 10.5 + number}
        orders.send(json.dumps(value).encode(), key=customer)
        payment = {"order_id": order, "method": "card"}
        payments.send(json.dumps(payment).encode(), key=order)
print("sent 10 orders and their payments")
