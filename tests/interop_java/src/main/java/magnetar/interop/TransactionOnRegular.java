package magnetar.interop;

import java.util.List;

/** Transactions of this client reach over regular topics, with and without partitions, too. */
final class TransactionOnRegular implements Scenario {
    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String scalable = server.create(server.freshName("transaction-scalable"), 2);
        String plain = server.freshName("transaction-regular");
        server.createRegular(plain);
        TransactionTwoTopics.use(server, scalable, Server.regular(plain));
        String partitioned = server.freshName("transaction-partitioned");
        server.createPartitioned(partitioned, 3);
        TransactionTwoTopics.use(server, Server.regular(partitioned),
                Server.regular(server.freshName("transaction-created")));
    }
}
