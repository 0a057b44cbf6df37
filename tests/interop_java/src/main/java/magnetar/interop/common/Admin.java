package magnetar.interop.common;

import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.concurrent.atomic.AtomicInteger;

/** The admin interface of the server under test, and names that nobody else uses there. */
public final class Admin {
    public static final String NAMESPACE = "public/default";

    private final String url;
    private final HttpClient http = HttpClient.newHttpClient();
    private final String run = Long.toString(System.currentTimeMillis(), Character.MAX_RADIX);
    private final AtomicInteger names = new AtomicInteger();

    public Admin(String url) {
        this.url = url;
    }

    /** A local name that nothing has yet; it differs between runs on one server too. */
    public String freshName(String stem) {
        return stem + "-" + run + "-" + names.incrementAndGet();
    }

    /** Creates a topic without partitions, and gives its name back. */
    public String createRegular(String name) throws IOException, InterruptedException {
        call("PUT", "persistent/" + NAMESPACE + "/" + name, "");
        return "persistent://" + NAMESPACE + "/" + name;
    }

    public String createPartitioned(String name, int partitions)
            throws IOException, InterruptedException {
        String path = "persistent/" + NAMESPACE + "/" + name + "/partitions";
        call("PUT", path, Integer.toString(partitions));
        return "persistent://" + NAMESPACE + "/" + name;
    }

    /** Creates a namespace of its own, and gives its name back. */
    public String createNamespace(String name) throws IOException, InterruptedException {
        call("PUT", "namespaces/public/" + name, "");
        return "public/" + name;
    }

    /** What stands under `/admin/v2/`; it must be a success. The body of the answer. */
    public String call(String method, String path, String body)
            throws IOException, InterruptedException {
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/admin/v2/" + path))
                .timeout(Limits.PATIENCE)
                .header("Content-Type", "application/json")
                .method(method, HttpRequest.BodyPublishers.ofString(body))
                .build();
        HttpResponse<String> answer = http.send(request, HttpResponse.BodyHandlers.ofString());
        Expect.that(answer.statusCode() < 300,
                method + " " + path + ": " + answer.statusCode() + " " + answer.body());
        return answer.body();
    }
}
